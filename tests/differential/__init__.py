"""Behaviour beside accelerate 1.15, which is installed in an environment of its own and called as a black box.

A program under `programs/` uses the public interface only and records what it sees, case by case. Both libraries run the
same program; a case in which they differ fails, unless the test names it as an intended difference, with the reason. A
named difference that no longer occurs fails too.

    uv run tools/dev.py differential
"""
