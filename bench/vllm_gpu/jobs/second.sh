# SPDX-License-Identifier: Apache-2.0
# Four GPUs, 9 minutes: conversations, arrivals beside steps, the other plans, a stopped daemon, two engines.
job 0 250 trace --trace --gib 56 --engines plain,native:16,ours
job 0 540 shared --shared
job 1 540 arrive --engines plain,native:16,ours --parts decode,arrive --quick
job 2 540 plans --plans --quick --engines "plain,plan:full,plan:window,plan:bits"
job 3 300 stopped --stopped
job 3 540 hybrids --plans --family gemma3 --engines "plain,plan:full,plan:quest{budget = 256}"
