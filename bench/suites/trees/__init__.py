"""The suite `trees`: samples that share their prompts, computed once and computed repeatedly."""
