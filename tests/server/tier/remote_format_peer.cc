// SPDX-License-Identifier: Apache-2.0
// The C++ side of tests/server/tier/remote_format_peers.py: writes and opens values of a remote
// tier for an independent implementation. Objects lie in files, what they are in JSON lines.
//
//   remote_format_peer write FOLDER   of each line {secret, tenant, seal, key, place, sizes,
//   written,
//                                     file}: the value whose bytes are in `file` becomes file.0,
//                                     file.1, ...; prints the names of the stripes
//   remote_format_peer open FOLDER    of each line, with `now` too: file.0, file.1, ... are opened
//                                     and must be the bytes of `file`; prints OK, WRONG or the
//                                     reason
// Keys, places and tenants are in hexadecimal.
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "server/tier/remote_format.h"

namespace kvstrata::remote {
namespace {

std::string FromHex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

std::vector<std::byte> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::span<const std::byte> bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

void Append(std::ofstream* file, std::span<const std::byte> bytes) {
  file->write(reinterpret_cast<const char*>(bytes.data()),
              static_cast<std::streamsize>(bytes.size()));
}

struct Case {
  Case(const nlohmann::json& json, const std::string& folder)
      : format(RemoteSecret::Of(std::string(json["secret"])).value(), FromHex(json["tenant"]),
               {json["seal"] == "gcm" ? Seal::kGcm : Seal::kNone}),
        key(FromHex(json["key"])),
        place(FromHex(json["place"])),
        path(folder + "/" + std::string(json["file"])),
        bytes(ReadFile(path)),
        sizes(json["sizes"]),
        written(std::chrono::seconds(uint64_t{json["written"]})) {}

  template <typename Byte>
  std::vector<std::span<Byte>> BuffersIn(std::span<Byte> all) const {
    std::vector<std::span<Byte>> buffers;
    for (const uint64_t size : sizes) {
      buffers.push_back(all.first(size));
      all = all.subspan(size);
    }
    return buffers;
  }

  RemoteFormat format;
  std::string key, place, path;
  std::vector<std::byte> bytes;
  std::vector<uint64_t> sizes;
  WallTime written;
};

std::string Write(const Case& c) {
  const auto buffers = c.BuffersIn<const std::byte>(c.bytes);
  const OutgoingValue value = c.format.Prepare(c.key, buffers, c.written).value();
  std::vector<std::byte> room(kStripeBytes);
  nlohmann::json names;
  for (uint32_t i = 0; i < value.stripes; ++i) {
    const OutgoingStripe stripe = c.format.Write(value, i, room);
    std::ofstream file(c.path + "." + std::to_string(i), std::ios::binary);
    Append(&file, stripe.header);
    for (const std::span<const std::byte> part : stripe.bytes) Append(&file, part);
    names.push_back(c.format.NameOf(c.key, c.place, i));
  }
  return names.dump();
}

std::string Open(const Case& c, WallTime now) {
  std::vector<std::byte> got(c.bytes.size());
  IncomingValue value = c.format.Expect(c.key, c.BuffersIn<std::byte>(got)).value();
  for (uint32_t i = 0; i < value.stripes(); ++i) {
    const std::vector<std::byte> object = ReadFile(c.path + "." + std::to_string(i));
    const std::span<const std::byte> all(object);
    std::span<const std::byte> rest = all.subspan(std::min(kHeaderBytes, all.size()));
    for (const std::span<std::byte> part : value.parts(i)) {
      std::copy_n(rest.begin(), std::min(part.size(), rest.size()), part.begin());
      rest = rest.subspan(std::min(part.size(), rest.size()));
    }
    const auto header = all.first(std::min(kHeaderBytes, all.size()));
    const Status opened = c.format.Open(&value, i, header, object.size(), now);
    if (!opened.ok()) return opened.reason();
  }
  return value.complete() && got == c.bytes ? "OK" : "WRONG";
}

}  // namespace
}  // namespace kvstrata::remote

int main(int argc, char** argv) {
  using namespace kvstrata::remote;
  const std::string verb = argc == 3 ? argv[1] : "";
  if (verb != "write" && verb != "open") return 2;
  for (std::string line; std::getline(std::cin, line);) {
    const nlohmann::json json = nlohmann::json::parse(line);
    const Case c(json, argv[2]);
    const auto now = [&] { return WallTime(std::chrono::seconds(uint64_t{json["now"]})); };
    std::cout << (verb == "write" ? Write(c) : Open(c, now())) << "\n";
  }
  return 0;
}
