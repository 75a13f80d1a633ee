// SPDX-License-Identifier: Apache-2.0
// Options of every codec but raw, which holds rows in another form. Rows: codec_rows.cc.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvstrata {

// Whether raw pages stay once a codec holds their rows (ADR 5). kAuto: on `host` while there is
// room.
enum class KeepRaw : uint8_t { kAuto, kNo, kHost };
std::string_view NameOf(KeepRaw k);

struct StoredOptions {
  // The most that stored rows may differ from their own, relative to them; where they would by
  // more, the codec takes a milder form, or keeps raw rows. 1: no limit.
  double max_loss = 0.3;
  KeepRaw keep_raw = KeepRaw::kAuto;

  bool operator==(const StoredOptions&) const = default;
};

}  // namespace kvstrata
