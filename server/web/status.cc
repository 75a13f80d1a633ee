// SPDX-License-Identifier: Apache-2.0
// /: the status page, one file (status.html) that this program has in it.
#include <openssl/evp.h>
#include <openssl/sha.h>

#include <array>
#include <string>

#include "server/web/pages.h"

namespace kvstrata {
namespace {

// What stands between <tag> and </tag>.
std::string_view Between(std::string_view html, const std::string& tag) {
  const size_t begin = html.find("<" + tag + ">") + tag.size() + 2;
  return html.substr(begin, html.find("</" + tag + ">", begin) - begin);
}

// 'sha256-...': the only script and the only style that a browser runs here.
std::string SourceHash(std::string_view text) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  std::array<unsigned char, 64> base64;
  const int n = EVP_EncodeBlock(base64.data(), digest.data(), static_cast<int>(digest.size()));
  return "'sha256-" +
         std::string(reinterpret_cast<const char*>(base64.data()), static_cast<size_t>(n)) + "'";
}

std::string PolicyOf(std::string_view html) {
  return "default-src 'none'; script-src " + SourceHash(Between(html, "script")) + "; style-src " +
         SourceHash(Between(html, "style")) +
         "; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
}

}  // namespace

HttpAnswer StatusPage(PageSource*, const HttpRequest& request) {
  if (auto refused = RefuseForeign(request)) return *std::move(refused);
  static const std::string* const policy = new std::string(PolicyOf(kStatusHtml));
  HttpAnswer answer;
  answer.type = "text/html; charset=utf-8";
  answer.body = kStatusHtml;
  answer.policy = *policy;
  return answer;
}

}  // namespace kvstrata
