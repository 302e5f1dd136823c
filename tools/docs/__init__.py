"""The documentation site: what is generated for it, and what is checked of it."""
