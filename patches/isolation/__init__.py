"""Whether a bit of one document of a batch reaches another."""
