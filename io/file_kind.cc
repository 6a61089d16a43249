#include "fullshard/io/file_kind.h"

#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"

namespace fullshard {
namespace {

using Bytes = absl::string_view;

// The magic number that torch.save pickled before PyTorch 1.6.
constexpr Bytes kLegacyMagic("\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19",
                             12);
constexpr Bytes kZipMagic("PK\x03\x04", 4);
constexpr Bytes kEmptyZipMagic("PK\x05\x06", 4);

}  // namespace

FileKind file_kind(Bytes bytes) {
  const Bytes start = bytes.substr(0, 512);
  if (absl::StartsWith(start, kZipMagic)) return FileKind::kZip;
  if (absl::StartsWith(start, kEmptyZipMagic)) return FileKind::kEmptyZip;
  if (absl::StartsWith(kZipMagic, start)) return FileKind::kCutZip;
  if (start.size() > 14 && start.substr(2, 12) == kLegacyMagic) {
    return FileKind::kLegacyPt;
  }
  if (start.size() > 9 && start[8] == '{' &&
      start.substr(5, 3) == Bytes("\0\0\0", 3)) {
    return FileKind::kSafetensors;
  }
  if (start.size() > 262 && start.substr(257, 5) == "ustar") {
    return FileKind::kTar;
  }
  const std::string text = absl::AsciiStrToLower(
      absl::StripLeadingAsciiWhitespace(start.substr(0, 256)));
  if (absl::StartsWith(text, "version https://git-lfs")) {
    return FileKind::kGitLfsPointer;
  }
  if (absl::StartsWith(text, "<!doctype html") ||
      absl::StartsWith(text, "<html")) {
    return FileKind::kHtml;
  }
  if (absl::StartsWith(text, "{")) return FileKind::kJson;
  return FileKind::kUnknown;
}

Bytes describe(FileKind kind) {
  switch (kind) {
    case FileKind::kUnknown:
      return "not a checkpoint: its first bytes belong to no known format";
    case FileKind::kZip:
      return "a ZIP archive (a .pt file)";
    case FileKind::kLegacyPt:
      return "a .pt file in the legacy format (before PyTorch 1.6)";
    case FileKind::kSafetensors:
      return "a safetensors file";
    case FileKind::kCutZip:
      return "cut short: a few bytes of a checkpoint";
    case FileKind::kEmptyZip:
      return "an empty ZIP archive";
    case FileKind::kTar:
      return "a tar archive, not a checkpoint";
    case FileKind::kGitLfsPointer:
      return "a Git-LFS pointer, not the checkpoint itself; fetch it with git "
             "lfs";
    case FileKind::kHtml:
      return "a web page (HTML), not a checkpoint";
    case FileKind::kJson:
      return "a JSON file, not a checkpoint";
  }
  return "not a checkpoint";
}

}  // namespace fullshard
