"""What only a GPU can show; skipped without one, and run only when named alone: `uv run pytest tests/gpu`."""
