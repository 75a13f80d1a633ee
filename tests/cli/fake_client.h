// SPDX-License-Identifier: Apache-2.0
// What a test may tell the fake client library (fake_client.cc) beyond its C ABI.
#pragma once

#include <string>
#include <vector>

struct FakeLibrary {
  std::vector<float> losses;        // plan mosaickv's, [n / 4][4]; empty: there is no such array
  std::string refused_plan;         // its name is answered with PLAN_UNIMPLEMENTED
  bool list_backwards = false;      // selections are handed out in descending order
  std::vector<std::string> opened;  // texts of the plans of all sequences, in order
  std::vector<unsigned> prompt_tokens;  // beside them, the length of the prompt
};
// Reset to a default FakeLibrary by whoever changes it.
extern FakeLibrary fake_library;
