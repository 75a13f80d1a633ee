// SPDX-License-Identifier: Apache-2.0
#include "server/store/options/user_limits.h"

#include <algorithm>
#include <deque>
#include <limits>

#include "base/check.h"

namespace kvstrata {
namespace {

constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();
constexpr std::string_view kDefault = "default";

struct LimitText {
  std::string_view name, reason, next;
};

constexpr std::array<LimitText, kLimits> kTexts = {{
    {"sessions", "SESSION_LIMIT", "detach some, or end the processes that hold them"},
    {"attaches_per_second", "ATTACH_RATE", "attach again in a second, and stay attached"},
    {"connections", "CONNECTIONS", "close some, or use one connection for more calls"},
    {"models", "MODEL_LIMIT", "end the sessions that registered models which are not in use"},
    {"sequences", "SEQUENCE_LIMIT", "close some"},
    {"device_bytes", "POOL_EXHAUSTED", "close sequences, or use a plan that keeps less"},
    {"host_bytes", "POOL_EXHAUSTED", "close sequences, or use a plan that keeps less"},
    {"queued_work", "WORK_QUEUE", "wait for some of it"},
}};

const LimitText& TextOf(Limit limit) { return kTexts[static_cast<size_t>(limit)]; }

}  // namespace

std::string_view NameOf(Limit limit) { return TextOf(limit).name; }
std::string_view ReasonOf(Limit limit) { return TextOf(limit).reason; }

std::optional<Limit> LimitOf(std::string_view name) {
  const auto found = std::ranges::find(kTexts, name, &LimitText::name);
  if (found == kTexts.end()) return std::nullopt;
  return static_cast<Limit>(found - kTexts.begin());
}

std::string LimitNames() {
  std::string names;
  for (size_t i = 0; i < kLimits; ++i) {
    names += (i == 0 ? "" : ", ") + std::string(NameOf(static_cast<Limit>(i)));
  }
  return names;
}

bool CountsBytes(Limit limit) { return limit == Limit::kDeviceBytes || limit == Limit::kHostBytes; }

uint64_t MostOf(Limit limit) {
  return CountsBytes(limit) ? uint64_t{1} << 50 : uint64_t{1'000'000'000};
}

class UserLimits::User {
 public:
  explicit User(std::string n) : name(std::move(n)) {}
  const std::string name;
  LimitNumbers used;                       // but of the rate
  std::deque<Clock::time_point> attaches;  // in the last second
  uint64_t refused = 0;
};

UserLimits::UserLimits(UserLimitsOptions options) : options_(std::move(options)) {
  Configure(options_.defaults, options_.users);
}

void UserLimits::Configure(LimitNumbers defaults,
                           std::map<std::string, std::map<Limit, uint64_t>> users) {
  for (const auto& [name, limits] : users) For(name);
  MutexLock lock(mu_);
  defaults_ = defaults;
  configured_ = std::move(users);
}
UserLimits::~UserLimits() = default;

UserLimits::User* UserLimits::For(const std::string& name) {
  MutexLock lock(mu_);
  std::unique_ptr<User>& user = users_[name];
  if (user == nullptr) user = std::make_unique<User>(name);
  return user.get();
}

uint64_t UserLimits::DefaultOf(Limit limit) const {
  const auto set = set_.find(std::string(kDefault));
  if (set == set_.end() || !set->second.contains(limit)) return defaults_[limit];
  return set->second.at(limit);
}

uint64_t UserLimits::LimitFor(const User& user, Limit limit) const {
  const auto in = [limit](const auto& by_user, const std::string& name) -> std::optional<uint64_t> {
    const auto found = by_user.find(name);
    if (found == by_user.end()) return std::nullopt;
    const auto value = found->second.find(limit);
    return value == found->second.end() ? std::nullopt : std::optional(value->second);
  };
  std::optional<uint64_t> value = in(set_, user.name);
  if (!value) value = in(configured_, user.name);
  if (!value && options_.operators.contains(user.name)) return 0;
  return value.value_or(DefaultOf(limit));
}

uint64_t UserLimits::UsedNow(const User& user, Limit limit) const {
  if (limit != Limit::kAttachesPerSecond) return user.used[limit];
  const Clock::time_point since = options_.now() - std::chrono::seconds(1);
  return static_cast<uint64_t>(
      std::ranges::count_if(user.attaches, [since](Clock::time_point at) { return at > since; }));
}

Status UserLimits::Take(User* user, Limit limit, uint64_t n) {
  MutexLock lock(mu_);
  const uint64_t most = LimitFor(*user, limit), used = UsedNow(*user, limit);
  if (most != 0 && (n > most || used > most - n)) {
    ++user->refused;
    return Refusal(*user, limit, n);
  }
  if (limit != Limit::kAttachesPerSecond) {
    user->used[limit] += n;
    return OkStatus();
  }
  const Clock::time_point now = options_.now();
  while (!user->attaches.empty() && now - user->attaches.front() >= std::chrono::seconds(1)) {
    user->attaches.pop_front();
  }
  // Without a limit nothing is kept but what a report may want to know.
  if (most != 0 || user->attaches.size() < 1000)
    user->attaches.insert(user->attaches.end(), n, now);
  return OkStatus();
}

void UserLimits::Note(User* user, Limit limit, uint64_t n) {
  MutexLock lock(mu_);
  user->used[limit] += n;
}

void UserLimits::Give(User* user, Limit limit, uint64_t n) {
  MutexLock lock(mu_);
  KVS_CHECK(user->used[limit] >= n);
  user->used[limit] -= n;
}

uint64_t UserLimits::Room(const User* user, Limit limit) const {
  MutexLock lock(mu_);
  const uint64_t most = LimitFor(*user, limit);
  return most == 0 ? kNoLimit : most - std::min(most, UsedNow(*user, limit));
}

uint64_t UserLimits::Used(const User* user, Limit limit) const {
  MutexLock lock(mu_);
  return UsedNow(*user, limit);
}

std::string UserLimits::Describe(const User* user, Limit limit) const {
  MutexLock lock(mu_);
  return user->name + " has " + std::to_string(UsedNow(*user, limit)) + " of the " +
         std::to_string(LimitFor(*user, limit)) + " " + std::string(NameOf(limit)) +
         " that it may have";
}

void UserLimits::CountRefused(User* user) {
  MutexLock lock(mu_);
  ++user->refused;
}

Status UserLimits::Refusal(const User& user, Limit limit, uint64_t n) const {
  const std::string name(NameOf(limit));
  std::string more = n == 1 ? "" : " and wants " + std::to_string(n) + " more";
  return ResourceExhausted(std::string(ReasonOf(limit)),
                           user.name + " has " + std::to_string(UsedNow(user, limit)) + " " + name +
                               more + "; its limit is " + std::to_string(LimitFor(user, limit)) +
                               " (limits." + name + "): " + std::string(TextOf(limit).next) +
                               ", or have an operator raise it: kvstrata quota set " + user.name +
                               " " + name + " N");
}

void UserLimits::Set(const std::string& name, Limit limit, uint64_t value) {
  if (name != kDefault) For(name);
  MutexLock lock(mu_);
  set_[name][limit] = value;
}

void UserLimits::Reset(const std::string& name, Limit limit) {
  MutexLock lock(mu_);
  const auto found = set_.find(name);
  if (found != set_.end()) found->second.erase(limit);
}

LimitNumbers UserLimits::defaults() const {
  MutexLock lock(mu_);
  LimitNumbers defaults;
  for (size_t i = 0; i < kLimits; ++i) {
    const auto limit = static_cast<Limit>(i);
    defaults[limit] = DefaultOf(limit);
  }
  return defaults;
}

UserReport UserLimits::ReportOfLocked(const User& user) const {
  UserReport report;
  report.user = user.name;
  report.refused = user.refused;
  for (size_t i = 0; i < kLimits; ++i) {
    const auto limit = static_cast<Limit>(i);
    report.limits[limit] = LimitFor(user, limit);
    report.used[limit] = UsedNow(user, limit);
    if (report.limits[limit] != DefaultOf(limit)) report.changed.push_back(limit);
  }
  return report;
}

UserReport UserLimits::ReportOf(const std::string& name) const {
  MutexLock lock(mu_);
  const auto found = users_.find(name);
  return ReportOfLocked(found == users_.end() ? User(name) : *found->second);
}

std::vector<UserReport> UserLimits::Report() const {
  MutexLock lock(mu_);
  std::vector<UserReport> reports;
  for (const auto& [name, user] : users_) reports.push_back(ReportOfLocked(*user));
  return reports;
}

Result<UserPlace> UserPlace::Take(std::shared_ptr<UserLimits> limits, const std::string& user,
                                  Limit limit) {
  UserPlace place;
  UserLimits::User* const of = limits->For(user);
  KVS_RETURN_IF_ERROR(limits->Take(of, limit));
  place.limits_ = std::move(limits);
  place.user_ = of;
  place.limit_ = limit;
  return place;
}

}  // namespace kvstrata
