// SPDX-License-Identifier: Apache-2.0
// How the members of a step on a GPU are cut into parts: members that follow each other and attend
// alike share launches, a prompt chunk that selects has one of its own.
#pragma once

#include <vector>

#include "kernels/step/gpu/frame/cuda_part.h"

namespace kvstrata {

class CudaFrame;      // cuda_frame.h
class CudaWorkspace;  // cuda_workspace.h

std::vector<CudaPart> CutParts(const CudaFrame& frame, const CudaWorkspace& workspace);

// One new token of each member, behind its prompt: nothing but what later steps do again.
bool Decodes(const std::vector<CudaPart>& parts);

// Whether a graph that was captured of `captured` does all that a step of `parts` does: one that
// promotes serves members without pages in the host's memory, too, and one that selects short
// members.
bool Serves(std::vector<CudaPart> captured, const std::vector<CudaPart>& parts);

}  // namespace kvstrata
