#ifndef FULLSHARD_IO_FILE_KIND_H_
#define FULLSHARD_IO_FILE_KIND_H_

#include "absl/strings/string_view.h"

namespace fullshard {

// What the first bytes of a file say it is.
enum class FileKind {
  kUnknown,
  kZip,          // torch.save since PyTorch 1.6, or TorchScript
  kLegacyPt,     // torch.save before that
  kSafetensors,  // a plausible header length, then '{'
  kCutZip,       // fewer bytes than a ZIP archive's signature
  kEmptyZip,
  kTar,  // torch.save before PyTorch 0.1.10
  kGitLfsPointer,
  kHtml,
  kJson,
};

FileKind file_kind(absl::string_view bytes);

// "a Git-LFS pointer, not the checkpoint itself; fetch it with git lfs", ...
absl::string_view describe(FileKind kind);

}  // namespace fullshard

#endif  // FULLSHARD_IO_FILE_KIND_H_
