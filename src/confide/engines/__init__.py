"""Where clients run. An engine trains a cohort and hands back sums, never a list of updates."""
