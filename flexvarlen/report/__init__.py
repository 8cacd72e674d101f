"""Records as JSON lines, and the tables, figures and pages that are made from them."""
