"""Pipeline parallelism: a model split into stages between the blocks of its longest chain, each rank holding some.

Reading order: `split` (where), `stage_modules` and `stage` (one stage of a model), `shapes` and `group` (what travels
between stages, and by which process group), `microbatches` and `schedules` (a batch on its way), `model` (the module that
is called), `layout` and `gradients` (full state dicts; what stages agree on before an optimizer step), `inference`.
"""
