// SPDX-License-Identifier: Apache-2.0
// ClusterTenants: which tenant of the whole cluster a user of this node stands for
// (remote.tenants.USER.name; docs/remote_format.md, "Tenants").
//
// Page keys, and with them all that nodes share, have the cluster's name: "cluster:search" of a
// user that is mapped, "uid:1000" of one that is not. So no mapped tenant ever has the keys of one
// that is not. On this node users stay users: memory, limits and pins go by "uid:1000".
//
// At most one user of a node stands for a tenant: two would have equal keys, and an open looks in
// memory by key alone, so that one would map the other's arenas.
//
// A value; const methods from any thread. Cost: a map's look-up.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace kvstrata {

class ClusterTenants {
 public:
  // Who of this node stands for tenant `name` already; "": nobody, and `user` does from now on.
  // REQUIRES: `user` stands for none.
  std::string Map(const std::string& user, std::string_view name) {
    const std::string tenant = std::string("cluster:").append(name);
    const auto [at, added] = users_.try_emplace(tenant, user);
    if (!added) return at->second;
    names_.insert_or_assign(user, tenant);
    return "";
  }

  size_t size() const { return users_.size(); }

  // What page keys and other nodes call a user of this node; anybody else is called as before.
  std::string NameOf(std::string_view user) const { return Find(names_, user); }
  // The user of this node that page keys and other nodes call so; else the same name again.
  std::string UserOf(std::string_view name) const { return Find(users_, name); }

 private:
  using Names = std::map<std::string, std::string, std::less<>>;
  static std::string Find(const Names& names, std::string_view name) {
    const auto at = names.find(name);
    return at == names.end() ? std::string(name) : at->second;
  }

  Names names_, users_;  // by the other's keys
};

}  // namespace kvstrata
