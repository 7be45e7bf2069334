"""Side stores: prompt tokens outside the main slots, in pages of unequal heads or in a second precision."""
