"""Pipeline parallelism: a model split into stages between the blocks of its longest chain, each rank holding some.

Reading order: `split` (where), `stage_modules` and `stage` (one stage of a model), `shapes` and `group` (what is sent
between stages, and in which process group), `microbatches` and `schedules` (running a batch), `model` (the module
that is called), `layout` and `gradients` (full state dicts; collectives before an optimizer step),
`inference`.
"""
