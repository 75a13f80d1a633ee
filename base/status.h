// SPDX-License-Identifier: Apache-2.0
// Status and Result<T>: how every fallible function of kvstrata reports.
//
// A Status is a code, a reason and a message. Codes are gRPC's numbers and never change; a reason
// is a stable UPPER_SNAKE string that names the cause for programs (metrics labels, ErrorInfo);
// the message is for people and says the field, its value and the next step. Bugs abort (check.h);
// bad input never does.
//
// Thread-safety: values; share them like a std::string. Cost: OK allocates nothing.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "base/check.h"

namespace kvstrata {

enum class Code : int {
  kOk = 0,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
  kUnauthenticated = 16,
};

// "INVALID_ARGUMENT" and so on; "UNKNOWN" for a number that is no Code.
std::string_view CodeName(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string_view reason, std::string message)
      : code_(code), reason_(reason), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& reason() const { return reason_; }
  const std::string& message() const { return message_; }

  // "INVALID_ARGUMENT PLAN_UNKNOWN: plan 'ches' ..."; "OK".
  std::string ToString() const;

 private:
  Code code_ = Code::kOk;
  std::string reason_;
  std::string message_;
};

inline Status OkStatus() { return {}; }

inline Status InvalidArgument(std::string_view reason, std::string message) {
  return {Code::kInvalidArgument, reason, std::move(message)};
}
inline Status NotFound(std::string_view reason, std::string message) {
  return {Code::kNotFound, reason, std::move(message)};
}
inline Status FailedPrecondition(std::string_view reason, std::string message) {
  return {Code::kFailedPrecondition, reason, std::move(message)};
}
inline Status ResourceExhausted(std::string_view reason, std::string message) {
  return {Code::kResourceExhausted, reason, std::move(message)};
}
inline Status Unavailable(std::string_view reason, std::string message) {
  return {Code::kUnavailable, reason, std::move(message)};
}
inline Status Unimplemented(std::string_view reason, std::string message) {
  return {Code::kUnimplemented, reason, std::move(message)};
}
inline Status Internal(std::string_view reason, std::string message) {
  return {Code::kInternal, reason, std::move(message)};
}

// A T, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value)
      : state_(std::move(value)) {}  // NOLINT(google-explicit-constructor): reads as return value
  Result(Status status) : state_(std::move(status)) {  // NOLINT(google-explicit-constructor): same
    KVS_CHECK(!std::get<Status>(state_).ok());
  }

  bool ok() const { return std::holds_alternative<T>(state_); }
  Status status() const { return ok() ? Status() : std::get<Status>(state_); }

  // REQUIRES: ok()
  T& value() & {
    KVS_CHECK(ok());
    return std::get<T>(state_);
  }
  const T& value() const& {
    KVS_CHECK(ok());
    return std::get<T>(state_);
  }
  T&& value() && {
    KVS_CHECK(ok());
    return std::get<T>(std::move(state_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<Status, T> state_;
};

}  // namespace kvstrata

// Returns from the calling function when `expr` is a Status that is not OK.
#define KVS_RETURN_IF_ERROR(expr)                                                       \
  do {                                                                                  \
    if (::kvstrata::Status kvs_status_ = (expr); !kvs_status_.ok()) return kvs_status_; \
  } while (false)

// KVS_ASSIGN_OR_RETURN(auto x, F()): x is F()'s value, or the calling function returns its Status.
#define KVS_ASSIGN_OR_RETURN(lhs, expr) \
  KVS_ASSIGN_OR_RETURN_(KVS_CONCAT_(kvs_result_, __LINE__), lhs, expr)
#define KVS_ASSIGN_OR_RETURN_(tmp, lhs, expr) \
  auto tmp = (expr);                          \
  if (!tmp.ok()) return tmp.status();         \
  lhs = std::move(tmp).value()
#define KVS_CONCAT_(a, b) KVS_CONCAT2_(a, b)
#define KVS_CONCAT2_(a, b) a##b
