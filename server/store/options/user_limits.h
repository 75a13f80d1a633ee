// SPDX-License-Identifier: Apache-2.0
// UserLimits: how much of the daemon each user holds, and how much one user may hold, so that no
// user is in the way of the next one.
//
// A user is who the kernel says is at the other end ("uid:1000"). Its limits are, first to last:
// what an operator set since the start (Set), what the configuration says of it, the defaults.
// Operators (root and the daemon's own user) have no defaults. 0 is no limit. A limit that is
// lowered takes nothing away: what is held stays, nothing more is given.
//
// Ownership: users are made when they are first seen and live as long as the object; UserPlace
// keeps the object. Thread-safety: all methods, from any thread; the lock is a leaf. Cost: a lock
// and a few additions; For looks a name up.
// Errors: RESOURCE_EXHAUSTED, with a reason by limit (ReasonOf); the text has the user's own
// numbers and nobody else's, and the next step.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/sync.h"

namespace kvstrata {

// The numbers of UserNumbers in admin.proto, which says what each counts.
enum class Limit : uint8_t {
  kSessions,
  kAttachesPerSecond,  // a rate: what was taken comes back by itself, within a second
  kConnections,
  kModels,
  kSequences,
  kDeviceBytes,
  kHostBytes,
  kQueuedWork,
};
inline constexpr size_t kLimits = 8;

std::string_view NameOf(Limit limit);    // "sessions", as in admin.proto and the configuration
std::string_view ReasonOf(Limit limit);  // why it refuses: "SESSION_LIMIT"
std::optional<Limit> LimitOf(std::string_view name);
std::string LimitNames();  // "sessions, attaches_per_second, ..."
bool CountsBytes(Limit limit);
// The largest value that a limit may have; the smallest is 0, which is no limit.
uint64_t MostOf(Limit limit);

class LimitNumbers {
 public:
  uint64_t& operator[](Limit limit) { return values_[static_cast<size_t>(limit)]; }
  uint64_t operator[](Limit limit) const { return values_[static_cast<size_t>(limit)]; }

 private:
  std::array<uint64_t, kLimits> values_{};
};

struct UserLimitsOptions {
  LimitNumbers defaults;
  std::map<std::string, std::map<Limit, uint64_t>> users;  // as configured
  std::set<std::string> operators;
  std::function<std::chrono::steady_clock::time_point()> now = std::chrono::steady_clock::now;
};

struct UserReport {
  std::string user;
  LimitNumbers limits, used;
  uint64_t refused = 0;        // since the start, by any limit
  std::vector<Limit> changed;  // that are not the defaults'
};

class UserLimits {
 public:
  class User;

  explicit UserLimits(UserLimitsOptions options = {});
  ~UserLimits();

  User* For(const std::string& name);
  bool IsOperator(const std::string& name) const { return options_.operators.contains(name); }

  // All `n` or nothing.
  Status Take(User* user, Limit limit, uint64_t n = 1);
  // What has happened already, whatever the limit says.
  void Note(User* user, Limit limit, uint64_t n = 1);
  void Give(User* user, Limit limit, uint64_t n = 1);
  // What Take would still give; the largest number where there is no limit.
  uint64_t Room(const User* user, Limit limit) const;
  uint64_t Used(const User* user, Limit limit) const;
  // For who found out by Room, and counts once whatever it says: "uid:2 has 65536 of the 73728
  // device_bytes that it may have".
  std::string Describe(const User* user, Limit limit) const;
  void CountRefused(User* user);

  // Sets a limit of `name`, or, for "default", of all users that have none of their own.
  void Set(const std::string& name, Limit limit, uint64_t value);
  // The configuration says something else from now on; what operators set stays.
  void Configure(LimitNumbers defaults, std::map<std::string, std::map<Limit, uint64_t>> users);
  // Back to what the configuration says.
  void Reset(const std::string& name, Limit limit);

  LimitNumbers defaults() const;
  UserReport ReportOf(const std::string& name) const;
  std::vector<UserReport> Report() const;  // all that were seen or are configured, by name

 private:
  using Clock = std::chrono::steady_clock;

  uint64_t DefaultOf(Limit limit) const KVS_REQUIRES(mu_);
  uint64_t LimitFor(const User& user, Limit limit) const KVS_REQUIRES(mu_);
  uint64_t UsedNow(const User& user, Limit limit) const KVS_REQUIRES(mu_);
  Status Refusal(const User& user, Limit limit, uint64_t n) const KVS_REQUIRES(mu_);
  UserReport ReportOfLocked(const User& user) const KVS_REQUIRES(mu_);

  const UserLimitsOptions options_;  // but what Configure changes
  mutable Mutex mu_;
  LimitNumbers defaults_ KVS_GUARDED_BY(mu_);
  std::map<std::string, std::map<Limit, uint64_t>> configured_ KVS_GUARDED_BY(mu_);
  std::map<std::string, std::unique_ptr<User>> users_ KVS_GUARDED_BY(mu_);
  std::map<std::string, std::map<Limit, uint64_t>> set_ KVS_GUARDED_BY(mu_);  // by operators
};

// One of a limit's, released when it goes. A copy has none: what is copied takes a place of its
// own, or needs none.
class UserPlace {
 public:
  UserPlace() = default;
  static Result<UserPlace> Take(std::shared_ptr<UserLimits> limits, const std::string& user,
                                Limit limit);
  UserPlace(const UserPlace&) noexcept {}
  UserPlace(UserPlace&& other) noexcept { *this = std::move(other); }
  UserPlace& operator=(const UserPlace&) = delete;
  UserPlace& operator=(UserPlace&& other) noexcept {
    std::swap(limits_, other.limits_);
    std::swap(user_, other.user_);
    std::swap(limit_, other.limit_);
    return *this;
  }
  // Whether it is one: not a copy, nor given on.
  bool held() const { return limits_ != nullptr; }
  ~UserPlace() {
    if (limits_ != nullptr) limits_->Give(user_, limit_);
  }

 private:
  std::shared_ptr<UserLimits> limits_;
  UserLimits::User* user_ = nullptr;
  Limit limit_ = Limit::kSessions;
};

}  // namespace kvstrata
