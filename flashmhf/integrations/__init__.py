"""FlashMHF inside other tools: vLLM, torchtitan, PEFT."""
