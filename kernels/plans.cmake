# SPDX-License-Identifier: Apache-2.0
# The plans, a folder each, and their tables. A build may leave out two of them (plan/built_plans.h).
file(GLOB KVS_PLANS_SOURCES RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS
  plans/*.cc plans/*/*.cc plans/*/gpu/*.cc plans/*/ops/*/*.cc)
file(GLOB KVS_PLANS_CUDA_SOURCES CONFIGURE_DEPENDS plans/*/ops/*/*.cu)
foreach(plan SEKV MOSAICKV)
  if(NOT KVS_PLAN_${plan})
    string(TOLOWER ${plan} folder)
    list(FILTER KVS_PLANS_SOURCES EXCLUDE REGEX "plans/${folder}/")
    list(FILTER KVS_PLANS_CUDA_SOURCES EXCLUDE REGEX "plans/${folder}/")
  endif()
endforeach()
