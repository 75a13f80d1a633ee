# SPDX-License-Identifier: Apache-2.0
# Four GPUs, 9 minutes, with VLLM=33: what another version of vLLM could break.
job 0 540 load --quick --eager --engines native:16,ours,ours --parts load
job 1 540 families --families llama,fp8,gemma3,gpt_oss,deepseek_v3,qwen3_next,n_gram
job 2 540 kills --kills 4
job 3 540 plans --plans --quick --engines plain,plan:full,plan:quest
