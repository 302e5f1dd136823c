"""The file in which a machine's launch settings are kept."""
