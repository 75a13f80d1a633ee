// SPDX-License-Identifier: Apache-2.0
// Sums are those of xxhash.h, whichever instructions compute them and however bytes lie and are
// cut.
#include "base/checksum.h"

#include <gtest/gtest.h>

#include <bit>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/checksum_kernels.h"  // this source has xxhash.h for the baseline

namespace kvstrata {
namespace {

// Around what XXH3 treats apart: 16, 128 and 240 bytes, stripes of 64, blocks of 1024.
std::vector<size_t> Sizes() {
  std::vector<size_t> sizes;
  for (size_t n = 0; n <= 300; ++n) sizes.push_back(n);
  for (const size_t n : {1024, 2048, 16384, 262144}) {
    for (const size_t near : {n - 65, n - 1, n, n + 1, n + 63, n + 64}) sizes.push_back(near);
  }
  return sizes;
}

// Random bytes that begin one byte behind a multiple of 64.
class ChecksumTest : public ::testing::Test {
 protected:
  ChecksumTest() {
    std::mt19937 random(20261130);
    for (std::byte& byte : data_) byte = static_cast<std::byte>(random());
  }
  std::span<const std::byte> Bytes(size_t n) const {
    const size_t odd = -reinterpret_cast<uintptr_t>(data_.data()) % 64 + 1;
    return std::span(data_).subspan(odd, n);
  }

 private:
  std::vector<std::byte> data_ = std::vector<std::byte>(262144 + 256);
};

Checksum Canonical(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  return std::bit_cast<Checksum>(canonical);
}

TEST_F(ChecksumTest, IsThatOfTheLibrary) {
  for (const size_t n : Sizes()) {
    const auto bytes = Bytes(n);
    EXPECT_EQ(ShortChecksumOf(bytes), XXH3_64bits(bytes.data(), n)) << n;
    EXPECT_EQ(ChecksumOf(bytes), Canonical(XXH3_128bits(bytes.data(), n))) << n;
  }
}

TEST_F(ChecksumTest, PartsAreOneStringOfBytes) {
  for (const size_t n : Sizes()) {
    const auto bytes = Bytes(n);
    for (const size_t cut : {size_t{0}, n / 3, n / 2, n}) {
      const std::span<const std::byte> parts[] = {bytes.first(cut), {}, bytes.subspan(cut)};
      EXPECT_EQ(ChecksumOf(parts), ChecksumOf(bytes)) << cut << " of " << n;
    }
  }
  EXPECT_EQ(ChecksumOf(std::span<const std::span<const std::byte>>{}), ChecksumOf(Bytes(0)));
}

TEST_F(ChecksumTest, PiecesThatAreHandedOnAreAllBytesInOrder) {
  const std::vector<std::byte> large((size_t{3} << 19) + 7, std::byte{3});
  const std::span<const std::byte> all[] = {Bytes(0), Bytes(300), Bytes(262144), large};
  for (const std::span<const std::byte> bytes : all) {
    size_t at = 0;
    const auto piece = [&](std::span<const std::byte> next) {
      EXPECT_EQ(next.data(), bytes.data() + at);
      at += next.size();
    };
    EXPECT_EQ(ShortChecksumOf(bytes, piece), ShortChecksumOf(bytes));
    EXPECT_EQ(at, bytes.size());
  }
}

#ifdef __x86_64__
TEST_F(ChecksumTest, EveryInstructionSetGivesTheSame) {
  std::vector<std::pair<std::string, const ChecksumKernels*>> sets;
  if (__builtin_cpu_supports("avx2")) sets.emplace_back("AVX2", &kAvx2Checksums);
  if (__builtin_cpu_supports("avx512f")) sets.emplace_back("AVX-512", &kAvx512Checksums);
  if (sets.empty()) GTEST_SKIP() << "this CPU has the baseline alone";
  for (const auto& [name, set] : sets) {
    for (const size_t n : Sizes()) {
      const auto bytes = Bytes(n);
      EXPECT_EQ(set->sum64(bytes.data(), n), XXH3_64bits(bytes.data(), n)) << name << ", " << n;
      const Checksum wanted = Canonical(XXH3_128bits(bytes.data(), n));
      EXPECT_EQ(Canonical(set->sum128(bytes.data(), n)), wanted) << name << ", " << n;
      XXH3_state_t state;
      XXH3_64bits_reset(&state);
      set->update64(&state, bytes.data(), n / 3);
      set->update64(&state, bytes.data() + n / 3, n - n / 3);
      EXPECT_EQ(set->digest64(&state), XXH3_64bits(bytes.data(), n))
          << name << ", " << n << " in two";
      XXH3_128bits_reset(&state);
      set->update128(&state, bytes.data(), n / 3);
      set->update128(&state, bytes.data() + n / 3, n - n / 3);
      EXPECT_EQ(Canonical(set->digest128(&state)), wanted) << name << ", " << n << " in two";
    }
  }
}
#endif

// A sum on a disk or in a server that an older build wrote.
TEST(Checksum, OfKnownBytes) {
  const auto empty = ChecksumOf(std::span<const std::byte>{});
  EXPECT_EQ(empty, (Checksum{0x99, 0xaa, 0x06, 0xd3, 0x01, 0x47, 0x98, 0xd8, 0x60, 0x01, 0xc3, 0x24,
                             0x46, 0x8d, 0x49, 0x7f}));
  EXPECT_EQ(ShortChecksumOf({}), 0x2d06800538d394c2u);
}

}  // namespace
}  // namespace kvstrata
