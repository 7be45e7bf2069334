"""Side stores: slots beside the main ones, for heads of unequal length or for a second precision."""
