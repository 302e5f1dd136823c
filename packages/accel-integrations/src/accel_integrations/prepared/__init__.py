"""What came through `prepare`."""
