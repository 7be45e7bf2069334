"""What a KV-cache method is: the contract, the slots, and how they compose."""
