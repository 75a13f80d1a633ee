# SPDX-License-Identifier: Apache-2.0
# Four GPUs, 10 minutes: requests that arrive, blocks used again, two ranks.
job 0 560 arrivals --arrivals --engines plain,plan:quest
job 1 560 reused --reused 480
job 2,3 250 ranks --families tp2,tp2to1,tp1to2,pp2
job 2,3 560 plans --plans --ranks 2 --cases 130816x4 --engines plain,plan:quest
