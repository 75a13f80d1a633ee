// SPDX-License-Identifier: Apache-2.0
#include "client/cli/printer.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <utility>
#include <vector>

#include "client/cli/list_fit.h"

namespace kvstrata::cli {
namespace {

std::string Snprintf(const char* format, double value) {
  std::array<char, 64> text;
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

std::string Plain(const Json& value) {
  if (value.is_null()) return "-";
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    return text.empty() ? "-" : Printable(text);
  }
  if (value.is_number_float()) return Snprintf("%.6g", value.get<double>());
  return Printable(value.dump());
}

std::string Cell(const Json& row, const Column& column) {
  const Json::json_pointer pointer{std::string(column.pointer)};
  const Json value = row.contains(pointer) ? row.at(pointer) : Json();
  return column.format == nullptr || value.is_null() ? Plain(value) : column.format(value);
}

void Pad(std::string* line, const std::string& cell, size_t width, bool right, bool last) {
  const std::string space(width - std::min(width, Width(cell)), ' ');
  if (right) *line += space;
  *line += cell;
  if (!right && !last) *line += space;
}

using Cells = std::vector<std::vector<std::string>>;

// Lines of a list, headers and all; columns that do not fit are left out.
void PrintCells(const Style& style, std::span<const Column> columns, Cells& cells,
                std::ostream& out) {
  std::vector<size_t> widths(columns.size(), 0);
  for (const auto& line : cells) {
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], Width(line[i]));
  }
  if (style.format == Format::kTable) widths = Fit(columns, std::move(widths), style.width);
  size_t last = widths.size() - 1;
  while (widths[last] == 0 && last > 0) --last;
  for (auto& line : cells) {
    std::string text;
    for (size_t i = 0; i <= last; ++i) {
      if (widths[i] == 0) continue;
      if (i > 0) text += "  ";
      Pad(&text, Cut(std::move(line[i]), widths[i]), widths[i], columns[i].right, i == last);
    }
    out << text << "\n";
  }
}

// The document's own value, so that numbers are numbers; what is computed as a table shows it.
std::string CsvCell(const Json& row, const Column& column) {
  const Json::json_pointer pointer{std::string(column.pointer)};
  const Json value = row.contains(pointer) ? row.at(pointer) : Json();
  if (value.is_null()) return "";
  std::string text = value.dump();
  if (value.is_string()) text = Printable(value.get_ref<const std::string&>());
  if (value.is_structured()) {
    text = Cell(row, column);
    if (text == "-") return "";  // a table's none
  }
  if (text.find_first_of(",\"") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

void PrintCsv(const Style& style, std::span<const Json> rows, std::span<const Column> columns,
              std::ostream& out) {
  const auto line = [&](const auto& cell_of) {
    const char* comma = "";
    for (const Column& column : columns) out << std::exchange(comma, ",") << cell_of(column);
    out << "\n";
  };
  if (style.headers) line([](const Column& column) { return std::string(column.header); });
  for (const Json& row : rows) {
    line([&row](const Column& column) { return CsvCell(row, column); });
  }
}

// csv and name, of a list and of a record alike.
void PrintRows(const Style& style, std::span<const Json> rows, std::span<const Column> columns,
               std::ostream& out) {
  if (style.format == Format::kCsv) return PrintCsv(style, rows, columns, out);
  for (const Json& row : rows) out << Cell(row, columns.front()) << "\n";
}

bool IsPlainYaml(const std::string& text) {
  static constexpr std::array<std::string_view, 10> kWords = {"true", "false", "yes", "no", "on",
                                                              "off",  "null",  "y",   "n",  "nan"};
  if (text.empty() || !std::isalpha(static_cast<unsigned char>(text[0]))) return false;
  for (const char c : text) {
    if (!std::isalnum(static_cast<unsigned char>(c)) &&
        std::string_view("_-./").find(c) == std::string_view::npos) {
      return false;
    }
  }
  std::string lower = text;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return std::find(kWords.begin(), kWords.end(), lower) == kWords.end();
}

std::string YamlScalar(const Json& value) {
  if (!value.is_string()) return value.dump();
  const auto& text = value.get_ref<const std::string&>();
  // A JSON string is a double-quoted YAML scalar.
  return IsPlainYaml(text) ? text : value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Appends `value` where "key:" or "-" stands already; `indent` is that of its children.
void AppendYaml(const Json& value, int indent, bool in_list, std::string* out) {
  if (!value.is_structured() || value.empty()) {
    *out += " " + YamlScalar(value) + "\n";
    return;
  }
  const std::string space(static_cast<size_t>(indent), ' ');
  bool first = in_list;  // the first member of an object in a list stands beside the dash
  if (!in_list) *out += "\n";
  if (in_list && value.is_array()) {
    *out += "\n";
    first = false;
  }
  for (const auto& [key, child] : value.items()) {
    *out += first ? " " : space;
    first = false;
    *out += value.is_array() ? "-" : YamlScalar(Json(key)) + ":";
    AppendYaml(child, indent + 2, value.is_array(), out);
  }
}

// Cells of a record's line that its value may have; 0: any number.
size_t ValueRoom(const Style& style, size_t header) {
  constexpr size_t kFewest = 16;  // less is worse to read than lines that a terminal folds
  const bool folds = style.format == Format::kTable && style.headers;
  return folds && style.width >= header + 2 + kFewest ? style.width - header - 2 : 0;
}

}  // namespace

std::string OrDash(const Json& value) {
  const std::string text = value.is_string() ? value.get<std::string>() : "";
  return text.empty() ? "-" : Printable(text);
}

std::string Printable(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7F) {
      out += c;
      continue;
    }
    std::array<char, 8> code;
    std::snprintf(code.data(), code.size(), "\\x%02x", byte);
    out += code.data();
  }
  return out;
}

size_t Width(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

std::string ToYaml(const Json& document) {
  if (!document.is_structured() || document.empty()) return YamlScalar(document) + "\n";
  std::string out;
  AppendYaml(document, 0, false, &out);
  return out.substr(1);  // the line break before the first member
}

void PrintDocument(Format format, const Json& document, std::ostream& out) {
  if (format == Format::kYaml) {
    out << ToYaml(document);
  } else {
    out << document.dump(2, ' ', false, Json::error_handler_t::replace) << "\n";
  }
}

void PrintList(const Style& style, const Json& document, std::string_view rows,
               std::span<const Column> columns, std::ostream& out) {
  if (style.IsDocument()) return PrintDocument(style.format, document, out);
  const Json& list = document.at(std::string(rows));
  if (!style.IsTable()) {
    return PrintRows(style, list.get_ref<const Json::array_t&>(), columns, out);
  }
  Cells cells;
  if (style.headers) {
    cells.emplace_back();
    for (const Column& column : columns) cells.back().emplace_back(column.header);
  }
  for (const Json& row : list) {
    cells.emplace_back();
    for (const Column& column : columns) cells.back().push_back(Cell(row, column));
  }
  PrintCells(style, columns, cells, out);
}

void PrintBelow(const Style& style, const Json& document, std::string_view rows,
                std::span<const Column> columns, std::ostream& out) {
  if (!style.IsTable()) return;
  out << "\n";
  PrintList(style, document, rows, columns, out);
}

void PrintRecord(const Style& style, const Json& document, std::span<const Column> columns,
                 std::ostream& out) {
  if (style.IsDocument()) return PrintDocument(style.format, document, out);
  if (!style.IsTable()) return PrintRows(style, {&document, 1}, columns, out);
  size_t width = 0;
  for (const Column& column : columns) width = std::max(width, Width(column.header));
  const size_t room = ValueRoom(style, width);
  for (const Column& column : columns) {
    std::string line;
    if (style.headers) {
      Pad(&line, std::string(column.header), width, false, false);
      line += "  ";
    }
    const std::string value = Cell(document, column);
    if (room == 0) {
      out << line << value << "\n";
      continue;
    }
    for (const std::string& part : Wrap(value, room)) {
      out << std::exchange(line, std::string(width + 2, ' ')) << part << "\n";
    }
  }
}

std::string Bytes(const Json& value) {
  static constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto amount = value.get<double>();
  size_t unit = 0;
  while (amount >= 1024 && unit + 1 < kUnits.size()) {
    amount /= 1024;
    ++unit;
  }
  return Snprintf(unit == 0 ? "%.0f" : "%.1f", amount) + " " + kUnits[unit];
}

std::string Microseconds(const Json& value) {
  const auto us = value.get<uint64_t>();
  const uint64_t seconds = us / 1000000;
  if (seconds == 0) return us < 1000 ? std::to_string(us) + "us" : std::to_string(us / 1000) + "ms";
  const uint64_t parts[] = {seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60};
  static constexpr char kLetters[] = "dhms";
  for (size_t i = 0; i < 4; ++i) {  // the two largest parts
    if (parts[i] == 0) continue;
    std::string text = std::to_string(parts[i]) + kLetters[i];
    if (i < 3 && parts[i + 1] > 0) text += std::to_string(parts[i + 1]) + kLetters[i + 1];
    return text;
  }
  return "0s";
}

std::string YesNo(const Json& value) { return value.get<bool>() ? "yes" : "no"; }
std::string Fixed2(const Json& value) { return Snprintf("%.2f", value.get<double>()); }
std::string Fixed4(const Json& value) { return Snprintf("%.4f", value.get<double>()); }
std::string Percent(const Json& value) { return Snprintf("%.1f %%", value.get<double>() * 100); }

}  // namespace kvstrata::cli
