"""The CPU patches, one function each, grouped by the part of megatron-core that they touch.

A patch function returns the edits it consists of; its docstring says which stock line needs it and why.
`megatron_ext.cpu` applies and undoes them.
"""
