"""What is right where: leaks of plain transformers, every family, every backend's capabilities."""
