"""The suite `mask-build`: building document BlockMasks, ours beside create_block_mask's."""
