"""The suite `mask-build`: building BlockMasks, ours beside create_block_mask's; of trees too."""
