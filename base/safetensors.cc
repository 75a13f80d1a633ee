// SPDX-License-Identifier: Apache-2.0
#include "base/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/unique_fd.h"

namespace kvstrata {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeader = 100'000'000;  // the format's limit

struct DtypeSize {
  std::string_view name;
  uint64_t bytes;
};
constexpr std::array<DtypeSize, 14> kDtypes = {{{"BOOL", 1},
                                                {"U8", 1},
                                                {"I8", 1},
                                                {"F8_E5M2", 1},
                                                {"F8_E4M3", 1},
                                                {"I16", 2},
                                                {"U16", 2},
                                                {"F16", 2},
                                                {"BF16", 2},
                                                {"I32", 4},
                                                {"U32", 4},
                                                {"F32", 4},
                                                {"F64", 8},
                                                {"I64", 8}}};

Status Header(std::string message) { return InvalidArgument("HEADER", std::move(message)); }

Status Unreadable(int error) {
  const Code code = error == ENOENT ? Code::kNotFound : Code::kInvalidArgument;
  return {code, "UNREADABLE", std::strerror(error)};
}

// The reason for a file of this kind: TRACE_HEADER.
Status Of(std::string_view what, const std::string& place, const Status& status) {
  std::string reason;
  for (const char c : what) reason += static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  return {status.code(), reason + "_" + status.reason(), place + status.message()};
}

// A JSON integer within [0, limit].
bool ReadSize(const Json& value, uint64_t limit, uint64_t* out) {
  if (!value.is_number_unsigned()) return false;
  *out = value.get<uint64_t>();
  return *out <= limit;
}

// shape -> number of elements; false when it is no shape or beyond `limit`.
bool ReadShape(const Json& json, uint64_t limit, std::vector<int64_t>* shape, uint64_t* elements) {
  if (!json.is_array()) return false;
  *elements = 1;
  bool empty = false;
  for (const Json& entry : json) {
    uint64_t n = 0;
    if (!ReadSize(entry, limit, &n)) return false;
    shape->push_back(static_cast<int64_t>(n));
    empty = empty || n == 0;
    if (n > 0 && *elements > limit / n) return false;
    *elements *= std::max<uint64_t>(n, 1);
  }
  if (empty) *elements = 0;
  return true;
}

Result<TensorView> ReadTensor(const std::string& name, const Json& json,
                              std::span<const std::byte> data) {
  if (!json.is_object() || !json.contains("dtype") || !json["dtype"].is_string() ||
      !json.contains("shape") || !json.contains("data_offsets")) {
    return Header("tensor '" + name + "' must have dtype, shape and data_offsets");
  }
  TensorView view;
  view.dtype = json["dtype"].get<std::string>();
  const auto* size = std::find_if(kDtypes.begin(), kDtypes.end(),
                                  [&](const DtypeSize& d) { return d.name == view.dtype; });
  if (size == kDtypes.end()) {
    return Header("tensor '" + name + "': dtype '" + view.dtype + "' is unknown");
  }
  uint64_t elements = 0, begin = 0, end = 0;
  // No tensor has more elements than 2^48, whatever it says.
  if (!ReadShape(json["shape"], uint64_t{1} << 48, &view.shape, &elements)) {
    return Header("tensor '" + name + "': shape " + json["shape"].dump() +
                  " must be a list of sizes >= 0");
  }
  const Json& offsets = json["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || !ReadSize(offsets[0], UINT64_MAX, &begin) ||
      !ReadSize(offsets[1], UINT64_MAX, &end) || begin > end) {
    return Header("tensor '" + name + "': data_offsets " + offsets.dump() +
                  " must be [begin, end] with begin <= end");
  }
  if (end > data.size()) {
    return InvalidArgument("TRUNCATED", "tensor '" + name + "' ends at byte " +
                                            std::to_string(end) + " of the data, the file holds " +
                                            std::to_string(data.size()));
  }
  if (end - begin != elements * size->bytes) {
    return Header("tensor '" + name + "': data_offsets hold " + std::to_string(end - begin) +
                  " bytes, shape and dtype need " + std::to_string(elements * size->bytes));
  }
  view.bytes = data.subspan(begin, end - begin);
  if (reinterpret_cast<uintptr_t>(view.bytes.data()) % std::min<uint64_t>(size->bytes, 4) != 0) {
    return Header("tensor '" + name +
                  "': its bytes must begin at a multiple of its dtype's size; pad "
                  "the header with spaces");
  }
  return view;
}

// Tensors must tile the data: no gap, no overlap, nothing behind them.
Status CheckCover(const std::map<std::string, TensorView>& tensors,
                  std::span<const std::byte> data) {
  std::vector<std::pair<std::span<const std::byte>, std::string_view>> places;
  for (const auto& [name, view] : tensors) {
    if (!view.bytes.empty()) places.emplace_back(view.bytes, name);
  }
  std::sort(places.begin(), places.end(),
            [](const auto& a, const auto& b) { return a.first.data() < b.first.data(); });
  const std::byte* at = data.data();
  for (const auto& [bytes, name] : places) {
    if (bytes.data() != at) {
      return Header("tensor '" + std::string(name) + "': data_offsets " +
                    (bytes.data() < at ? "overlap" : "leave a gap before") + " it");
    }
    at = bytes.data() + bytes.size();
  }
  const auto behind = static_cast<size_t>(data.data() + data.size() - at);
  if (behind == 0) return OkStatus();
  return Header(std::to_string(behind) + " bytes behind the last tensor belong to none");
}

}  // namespace

Safetensors::Safetensors(Safetensors&& other) noexcept
    : metadata_(std::move(other.metadata_)),
      tensors_(std::move(other.tensors_)),
      mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_bytes_(other.mapped_bytes_) {}

Safetensors::~Safetensors() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_bytes_);
}

Status Safetensors::Map(const std::string& path) {
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return Unreadable(errno);
  struct stat st {};
  if (fstat(fd.get(), &st) != 0) return Unreadable(errno);
  if (!S_ISREG(st.st_mode)) {
    return InvalidArgument("UNREADABLE",
                           S_ISDIR(st.st_mode) ? "is a directory" : "is not a regular file");
  }
  const auto bytes = static_cast<size_t>(st.st_size);
  if (bytes > 0) {
    void* mapping = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd.get(), 0);
    if (mapping == MAP_FAILED) return Unreadable(errno);
    mapping_ = mapping;
    mapped_bytes_ = bytes;
  }
  return Read({static_cast<const std::byte*>(mapping_), bytes});
}

Result<Safetensors> Safetensors::Open(const std::string& path, std::string_view what) {
  Safetensors file;
  const Status status = file.Map(path);
  if (!status.ok()) return Of(what, std::string(what) + " '" + path + "': ", status);
  return file;
}

Result<Safetensors> Safetensors::Parse(std::span<const std::byte> bytes, std::string_view what) {
  Safetensors file;
  const Status status = file.Read(bytes);
  if (!status.ok()) return Of(what, "", status);
  return file;
}

Status Safetensors::Read(std::span<const std::byte> file) {
  if (file.size() < kLengthBytes) {
    return InvalidArgument("TRUNCATED", "header length: the file has " +
                                            std::to_string(file.size()) +
                                            " bytes, 8 are needed for it alone");
  }
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof(length));
  const auto* text = reinterpret_cast<const char*>(file.data()) + kLengthBytes;
  if (length < 2 || length > kMaxHeader || (file.size() > kLengthBytes && text[0] != '{')) {
    return InvalidArgument("FOREIGN", "header length " + std::to_string(length) + " (2 .. " +
                                          std::to_string(kMaxHeader) +
                                          ") and a '{' after it are how a "
                                          "safetensors file begins; this is none");
  }
  if (length > file.size() - kLengthBytes) {
    return InvalidArgument("TRUNCATED", "header: " + std::to_string(length) + " bytes announced, " +
                                            std::to_string(file.size() - kLengthBytes) +
                                            " are there");
  }
  const Json header = Json::parse(text, text + length, nullptr, false);
  if (!header.is_object()) return Header("header is no JSON object");
  const auto data = file.subspan(kLengthBytes + length);
  for (const auto& [name, value] : header.items()) {
    if (name != "__metadata__") {
      KVS_ASSIGN_OR_RETURN(TensorView view, ReadTensor(name, value, data));
      tensors_.emplace(name, std::move(view));
      continue;
    }
    if (!value.is_object()) return Header("__metadata__ must be an object of strings");
    for (const auto& [key, entry] : value.items()) {
      if (!entry.is_string()) return Header("__metadata__." + key + " must be a string");
      metadata_.emplace(key, entry.get<std::string>());
    }
  }
  return CheckCover(tensors_, data);
}

}  // namespace kvstrata
