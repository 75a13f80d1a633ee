// SPDX-License-Identifier: Apache-2.0
// The C++ side of tests/server/tier/remote_format_peers.py: writes and opens values of a remote
// tier for an independent implementation.
//
//   remote_format_peer write FOLDER   the value whose bytes are in FOLDER/FILE becomes FILE.0,
//                                     FILE.1, ...; prints the names of the stripes
//   remote_format_peer open FOLDER    opens FILE.0, FILE.1, ..., which must be the bytes of FILE;
//                                     prints OK, WRONG or the reason
// For each line: FILE SECRET TENANT SEAL KEY PLACE WRITTEN NOW SIZE..., tenant, key and place as x
// and hexadecimal digits.
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>

#include "server/tier/remote/remote_format.h"

namespace kvstrata::remote {
namespace {

// The next word of a line, "x" and digits.
std::string HexIn(std::istream* line) {
  std::string hex, bytes;
  *line >> hex;
  for (size_t i = 1; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

WallTime TimeIn(std::istream* line) {
  int64_t seconds = 0;
  *line >> seconds;
  return WallTime(std::chrono::seconds(seconds));
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
  Case(const std::string& text, const std::string& folder) {
    std::istringstream line(text);
    std::string file, secret, seal;
    line >> file >> secret;
    const std::string tenant = HexIn(&line);
    line >> seal;
    format.emplace(RemoteSecret::Of(secret).value(), tenant,
                   RemoteFormatOptions{seal == "gcm" ? Seal::kGcm : Seal::kNone});
    key = HexIn(&line);
    place = HexIn(&line);
    written = TimeIn(&line);
    now = TimeIn(&line);
    for (uint64_t size = 0; line >> size;) sizes.push_back(size);
    path = folder + "/" + file;
    bytes = ReadFile(path);
  }

  template <typename Byte>
  std::vector<std::span<Byte>> BuffersIn(std::span<Byte> all) const {
    std::vector<std::span<Byte>> buffers;
    for (const uint64_t size : sizes) {
      buffers.push_back(all.first(size));
      all = all.subspan(size);
    }
    return buffers;
  }

  std::optional<RemoteFormat> format;
  std::string key, place, path;
  std::vector<std::byte> bytes;
  std::vector<uint64_t> sizes;
  WallTime written, now;
};

std::string Write(const Case& c) {
  const auto buffers = c.BuffersIn<const std::byte>(c.bytes);
  const OutgoingValue value = c.format->Prepare(c.key, buffers, c.written).value();
  std::vector<std::byte> room(kStripeBytes);
  std::string names;
  for (uint32_t i = 0; i < value.stripes; ++i) {
    const OutgoingStripe stripe = c.format->Write(value, i, room);
    std::ofstream file(c.path + "." + std::to_string(i), std::ios::binary);
    Append(&file, stripe.header);
    for (const std::span<const std::byte> part : stripe.bytes) Append(&file, part);
    names += (i == 0 ? "" : " ") + c.format->NameOf(c.key, c.place, i);
  }
  return names;
}

std::string Open(const Case& c) {
  std::vector<std::byte> got(c.bytes.size());
  IncomingValue value = c.format->Expect(c.key, c.BuffersIn<std::byte>(got)).value();
  for (uint32_t i = 0; i < value.stripes(); ++i) {
    const std::vector<std::byte> object = ReadFile(c.path + "." + std::to_string(i));
    const std::span<const std::byte> all(object);
    std::span<const std::byte> rest = all.subspan(std::min(kHeaderBytes, all.size()));
    for (const std::span<std::byte> part : value.parts(i)) {
      std::copy_n(rest.begin(), std::min(part.size(), rest.size()), part.begin());
      rest = rest.subspan(std::min(part.size(), rest.size()));
    }
    const auto header = all.first(std::min(kHeaderBytes, all.size()));
    const Status opened = c.format->Open(&value, i, header, object.size(), c.now);
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
    const Case c(line, argv[2]);
    std::cout << (verb == "write" ? Write(c) : Open(c)) << "\n";
  }
  return 0;
}
