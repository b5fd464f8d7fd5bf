"""`confide ui`: a page on this machine to plan privacy, look at runs and try models."""
