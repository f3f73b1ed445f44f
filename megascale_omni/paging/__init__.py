"""Where an expert's bytes are: layout, page table, tiers, leases."""
