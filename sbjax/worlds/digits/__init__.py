"""The world of moving digits: handwritten digits that cross a dark canvas as a prompt asks."""
