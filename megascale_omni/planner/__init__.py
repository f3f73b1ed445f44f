"""The planner: before a run, what fits where, what it will cost, and where paging does not pay."""
