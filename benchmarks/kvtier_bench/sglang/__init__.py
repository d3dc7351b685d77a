"""`kvtier bench sglang`: pages through SGLang's HiCache controller, into kvtier's backend and into SGLang's files.

Apart from `kvtier_sglang`, which cannot be imported without SGLang: the command line has to list this one without it.
"""
