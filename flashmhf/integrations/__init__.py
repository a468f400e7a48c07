"""FlashMHF inside other tools: ``vllm`` (its model class; ``vllm_plugin`` is the entry point, ``shards`` the layers)
and ``torchtitan``.
"""
