"""What a block is and whose: keys of tokens and tenants, the namespace of its bytes, the digest of the weights."""
