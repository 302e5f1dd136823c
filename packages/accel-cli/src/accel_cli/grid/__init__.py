"""`accelerate test --grid`: one script in many small configurations, each compared with one process."""
