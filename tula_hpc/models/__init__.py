"""Models of step time, memory, price and choice: numbers in, records out. No files, no jobs, no torch."""
