/** What the examples use of packages that are too large to install for a check. */
declare module 'next/headers' {
  export function cookies(): Promise<{
    get(name: string): { value: string } | undefined;
    set(name: string, value: string, options?: { httpOnly?: boolean; secure?: boolean; sameSite?: 'lax' | 'strict' | 'none' }): void;
    delete(name: string): void;
  }>;
}
declare module 'jose' {
  export class SignJWT {
    setProtectedHeader(header: { alg: string }): this;
    setSubject(subject: string): this;
    setExpirationTime(time: string): this;
    sign(key: Uint8Array): Promise<string>;
  }
}
declare module 'react-native-get-random-values';
declare module '@noble/hashes/legacy.js' {
  export function sha1(data: Uint8Array): Uint8Array;
}
declare module '@react-native-async-storage/async-storage' {
  const storage: {
    getItem(key: string): Promise<string | null>;
    setItem(key: string, value: string): Promise<void>;
    removeItem(key: string): Promise<void>;
    getAllKeys(): Promise<string[]>;
  };
  export default storage;
}
declare module 'react-native' {
  import type { ComponentType, ReactElement, ReactNode } from 'react';

  interface Shown {
    style?: { flex?: number };
    accessibilityRole?: 'alert' | 'button';
    accessibilityLabel?: string;
    accessibilityLiveRegion?: 'polite';
    children?: ReactNode;
  }
  export const View: ComponentType<Shown>;
  export const Text: ComponentType<Shown>;
  export const Pressable: ComponentType<Shown & { onPress?: () => void }>;
  export const KeyboardAvoidingView: ComponentType<Shown & { behavior?: 'padding' | undefined }>;
  export const TextInput: ComponentType<
    Shown & {
      value?: string;
      onChangeText?: (text: string) => void;
      onSubmitEditing?: () => void;
      autoCapitalize?: 'none';
      submitBehavior?: 'submit';
    }
  >;
  export function FlatList<Item>(props: {
    data: readonly Item[];
    inverted?: boolean;
    keyExtractor: (item: Item) => string;
    renderItem: (row: { item: Item }) => ReactElement;
    onEndReached?: () => void;
  }): ReactElement;
  export const AppState: {
    readonly currentState: 'active' | 'background' | 'inactive' | 'unknown' | 'extension';
    addEventListener(type: 'change', listener: (state: 'active' | 'background' | 'inactive') => void): { remove(): void };
  };
  export const Platform: { OS: 'ios' | 'android' };
}
