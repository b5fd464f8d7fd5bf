"""`confide bench`: made-up workloads through the real loop, beside other systems and beside plain PyTorch."""
