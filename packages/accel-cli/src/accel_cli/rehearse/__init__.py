"""`accelerate rehearse`: a script on a cluster that is not there, as one rank of it."""
