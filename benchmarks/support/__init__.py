"""What tests and benchmarks share: problems whose answer is known, and federations on this machine."""
