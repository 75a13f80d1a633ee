# SPDX-License-Identifier: Apache-2.0
# Four GPUs, 10 minutes: loads, what storing costs, plans, families and kills.
job 0 550 load --eager --disk --engines native:16,ours,ours --parts load
job 1 550 tax --tax
job 2 550 plans --plans --quick --engines "plain,plan:quest,plan:bits{run = 8}"
job 3 310 families --families llama,fp8,gemma3,gpt_oss,deepseek_v3,qwen3_next,jamba,n_gram,lora,llava,eagle,granite
job 3 550 kills --kills 10
