"""Value types that check nothing: quantities, the base of the spec's types, faults, status, the plan.

Not here: what an author writes (`omnipipeline_spec.pipeline`, `omnipipeline_spec.cluster`), which stand above.
"""
