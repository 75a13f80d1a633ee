// SPDX-License-Identifier: Apache-2.0
// Arrays of a test vector (tests/golden/README.md): a zip of stored .npy files, as numpy.savez
// writes it. For tests that hold ops to the vectors without a daemon.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace kvstrata {

struct GoldenArray {
  std::string dtype;           // as numpy spells it: "<f4", "<u2", "|u1", "<i4"
  std::vector<int64_t> shape;  // C order
  std::string data;

  template <typename T>
  const T* As() const {
    return reinterpret_cast<const T*>(data.data());
  }
  int64_t Size() const {
    int64_t size = 1;
    for (int64_t n : shape) size *= n;
    return size;
  }
};

class GoldenArrays {
 public:
  // An unreadable file has no arrays.
  explicit GoldenArrays(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string zip{std::istreambuf_iterator<char>(file), {}};
    const size_t end = zip.rfind("PK\5\6");
    if (end == std::string::npos) return;
    size_t at = Number(zip, end + 16, 4);
    for (size_t left = Number(zip, end + 10, 2); left > 0; --left) {
      const size_t name_size = Number(zip, at + 28, 2);
      const std::string name = zip.substr(at + 46, name_size);  // NAME.npy
      const size_t local = Number(zip, at + 42, 4);
      const size_t data = local + 30 + Number(zip, local + 26, 2) + Number(zip, local + 28, 2);
      arrays_[name.substr(0, name.size() - 4)] = Parse(zip.substr(data, Number(zip, at + 24, 4)));
      at += 46 + name_size + Number(zip, at + 30, 2) + Number(zip, at + 32, 2);
    }
  }
  bool Has(const std::string& name) const { return arrays_.contains(name); }
  // REQUIRES: Has(name), of this type.
  const GoldenArray& Get(const std::string& name, const std::string& dtype) const {
    const GoldenArray& array = arrays_.at(name);
    EXPECT_EQ(array.dtype, dtype) << name;
    return array;
  }

 private:
  static size_t Number(const std::string& bytes, size_t at, int size) {
    uint64_t x = 0;
    std::memcpy(&x, bytes.data() + at, static_cast<size_t>(size));
    return x;
  }
  // {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
  static GoldenArray Parse(const std::string& npy) {
    const size_t header = Number(npy, 8, 2);
    const std::string text = npy.substr(10, header);
    GoldenArray array;
    const size_t type = text.find("'descr': '") + 10;
    array.dtype = text.substr(type, text.find('\'', type) - type);
    EXPECT_NE(text.find("'fortran_order': False"), std::string::npos);
    std::istringstream shape(text.substr(text.find('(') + 1));
    for (int64_t n; shape >> n; shape.ignore()) array.shape.push_back(n);
    array.data = npy.substr(10 + header);
    return array;
  }

  std::map<std::string, GoldenArray> arrays_;
};

}  // namespace kvstrata
