"""What is only here for programs and libraries written for accelerate 1.15; nothing else in the project imports it.

`legacy` and its generated table answer for names that modules of 1.15 merely used, `seams` lists what other libraries
monkeypatch, `deprecated` translates retired methods and keywords. The rest are shims that no current code calls: `fsdp`,
`mixed_precision`, `megatron`, `menu`.
"""
