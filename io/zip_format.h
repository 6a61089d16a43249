#ifndef FULLSHARD_IO_ZIP_FORMAT_H_
#define FULLSHARD_IO_ZIP_FORMAT_H_

#include <cstdint>

namespace fullshard::internal {

// The records of a ZIP archive (APPNOTE.TXT 6.3): signature and fixed size.
constexpr uint32_t kLocalHeaderSignature = 0x04034b50;
constexpr uint32_t kDataDescriptorSignature = 0x08074b50;
constexpr uint32_t kDirectoryEntrySignature = 0x02014b50;
constexpr uint32_t kZip64EndSignature = 0x06064b50;
constexpr uint32_t kZip64LocatorSignature = 0x07064b50;
constexpr uint32_t kEndSignature = 0x06054b50;

constexpr uint64_t kLocalHeaderBytes = 30;
constexpr uint64_t kDirectoryEntryBytes = 46;
constexpr uint64_t kZip64EndBytes = 56;
constexpr uint64_t kZip64LocatorBytes = 20;
constexpr uint64_t kEndBytes = 22;

constexpr uint16_t kZip64ExtraId = 0x0001;
constexpr uint16_t kPaddingExtraId = 0x4246;  // "FB", as torch.save pads.

constexpr uint16_t kFlagEncrypted = 0x0001;
constexpr uint16_t kFlagDataDescriptor = 0x0008;
constexpr uint16_t kFlagUtf8 = 0x0800;

constexpr uint32_t kIn64Bits = 0xffffffff;
constexpr uint16_t kIn64Bits16 = 0xffff;

}  // namespace fullshard::internal

#endif  // FULLSHARD_IO_ZIP_FORMAT_H_
