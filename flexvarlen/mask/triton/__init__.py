"""The mask vectors and the BlockMask tables in one Triton launch."""
